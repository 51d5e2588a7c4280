wrong_CHAIN = 4
wrong_SOFTMAX = 3
wrong_TWO_AXES = 1
wrong_AROUND_A_PRODUCT = 1
wrong_LAYER_NORM_AND_BACK = 2
wrong_STRANGERS = 1
wrong_NEIGHBOURS = 3
