wrong_kernels_only = [("write_free(w, plan.free)", "write_free(w, plan.free if not isinstance(step, Kernel) else [])")]
wrong_first_only = [("write_free(w, plan.free)", "write_free(w, plan.free[:1])")]
wrong_too_early = [("        write_free(w, plan.free)\n", ""), ("        for new, old in plan.reuse:",
    "        write_free(w, plan.free)\n        for new, old in plan.reuse:")]
right_by_number = [("write_free(w, plan.free)", "write_free(w, [name for name in schedule.plan.steps[k].free])")]
