"""Models of timm and torchvision: their published small variants, with random weights.

A row is a name and the side of its images on a CPU and on a GPU. What a name stands for is in the library.
"""
from __future__ import annotations

import torch

from .huggingface import TINY, Sizes

# Families of timm. Where the architecture fixes the size of an image, both numbers are that size.
TIMM = {
    "resnet18": (64, 224), "resnet26d": (64, 224), "resnext50_32x4d": (64, 224), "seresnext26d_32x4d": (64, 224),
    "resnetv2_50": (64, 224),
    "dpn68": (64, 224), "densenet121": (64, 224), "efficientnet_b0": (64, 224), "mobilenetv2_100": (64, 224),
    "mobilenetv3_large_100": (64, 224), "mobilenetv4_conv_small": (64, 224), "ghostnet_100": (64, 224), "mnasnet_100": (64, 224),
    "mixnet_s": (64, 224), "rexnet_100": (64, 224), "regnetx_002": (64, 224), "regnety_002": (64, 224), "convnext_atto": (64, 224),
    "convnextv2_atto": (64, 224), "eca_nfnet_l0": (64, 224), "nf_resnet26": (64, 224), "vit_tiny_patch16_224": (224, 224),
    "deit3_small_patch16_224": (224, 224), "cait_xxs24_224": (224, 224), "xcit_nano_12_p16_224": (224, 224), "levit_128s": (224, 224),
    "mixer_s16_224": (224, 224), "gmlp_s16_224": (224, 224), "resmlp_12_224": (224, 224), "crossvit_tiny_240": (240, 240),
    "coat_lite_tiny": (224, 224), "pit_ti_224": (224, 224), "pvt_v2_b0": (64, 224), "twins_pcpvt_small": (224, 224),
    "visformer_tiny": (224, 224), "coatnet_nano_rw_224": (224, 224), "edgenext_xx_small": (64, 224), "mobileone_s0": (64, 224),
    "repvgg_a0": (64, 224), "fastvit_t8": (64, 224), "efficientvit_b0": (64, 224), "efficientformer_l1": (224, 224),
    "hrnet_w18_small": (64, 224), "dla34": (64, 224), "ese_vovnet19b_dw": (64, 224), "cspresnet50": (64, 224),
    "res2net50_26w_4s": (64, 224),
    "skresnet18": (64, 224), "resnest14d": (64, 224), "gernet_s": (64, 224), "botnet26t_256": (256, 256), "lambda_resnet26t": (256, 256),
    "eva02_tiny_patch14_224": (224, 224), "focalnet_tiny_srf": (64, 224), "starnet_s1": (64, 224), "hgnetv2_b0": (64, 224),
    "inception_next_atto": (64, 224), "caformer_s18": (64, 224), "repvit_m0_9": (64, 224), "mambaout_femto": (64, 224),
}
TORCHVISION = {
    "alexnet": (64, 224), "vgg11_bn": (64, 224), "googlenet": (64, 224), "inception_v3": (299, 299), "squeezenet1_1": (64, 224),
    "resnet50": (64, 224), "shufflenet_v2_x0_5": (64, 224), "mobilenet_v2": (64, 224), "mobilenet_v3_small": (64, 224),
    "mnasnet0_5": (64, 224), "efficientnet_b1": (64, 224), "regnet_y_400mf": (64, 224), "convnext_tiny": (64, 224),
    "vit_b_32": (224, 224), "swin_t": (64, 224), "swin_v2_t": (64, 224), "maxvit_t": (224, 224),
    "segmentation.fcn_resnet50": (64, 224), "segmentation.deeplabv3_mobilenet_v3_large": (64, 224),
    "segmentation.lraspp_mobilenet_v3_large": (64, 224), "video.r3d_18": (32, 112), "video.mc3_18": (32, 112),
    "video.r2plus1d_18": (32, 112),
    "video.s3d": (224, 224), "optical_flow.raft_small": (128, 128),
}


def images(side: int, s: Sizes, frames: int = 0):
    """Inputs: float32 [batch, 3, side, side], or [batch, 3, frames, side, side]."""
    shape = (3, frames, side, side) if frames else (3, side, side)
    return lambda batch=s.batch: {"args": (torch.randn(batch, *shape),)}


def build_timm(name: str, s: Sizes):
    import timm
    return timm.create_model(name, pretrained=False, drop_rate=0.0), images(TIMM[name][s is not TINY], s)


def build_torchvision(name: str, s: Sizes):
    import torchvision
    side = TORCHVISION[name][s is not TINY]
    folder, _, member = name.rpartition(".")
    library = getattr(torchvision.models, folder) if folder else torchvision.models
    settings = {"init_weights": True, "aux_logits": True} if name in ("googlenet", "inception_v3") else {}
    if folder == "segmentation":
        settings = {"weights_backbone": None}
    model = getattr(library, member)(weights=None, **settings)
    if folder == "optical_flow":
        return model, lambda batch=s.batch: {"args": (torch.rand(batch, 3, side, side), torch.rand(batch, 3, side, side)),
                                             "num_flow_updates": 3}
    return model, images(side, s, frames=16 if folder == "video" else 0)
