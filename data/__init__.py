"""Samples: from files and media to packed token ids, labels and preprocessed media.

    sources -> rows -> chat + labels -> text   (token ids, targets, placeholder slots)
                    -> media -> preprocess     (planned shapes from headers, arrays of exactly these shapes)
    index (what the plan needs of every sample, cached) -> sampler -> loader (one StepBatch a step)

Nothing here talks to other ranks; the order of samples and every planned number is a function of the files
and the configuration.
"""
