wrong_CHAIN = 5
wrong_COLUMN_MEANS = 1
wrong_SOFTMAX = 1
wrong_TWO_RESULTS = 1
wrong_THROUGH_A_PRODUCT = 1
wrong_TRANSPOSED = 2
