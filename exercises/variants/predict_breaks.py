wrong_STRAIGHT = 0
wrong_SHAPE = 2
wrong_PRINTING = 1
wrong_AT_THE_END = 2
wrong_DATA = 3
wrong_LOOP = 4
wrong_ITEM = 1
