wrong_THE_LOSS = False
wrong_KEPT_GRAPH = True
wrong_HIDDEN = False
wrong_ANOTHER_BRANCH = True
wrong_ON_TOP = False
wrong_ONLY_SUMS = True
wrong_OUT_OF_REACH = True
wrong_BY_GRAD = False
