"""The distance of a policy's answers from full prefill of the same model, on files of questions."""
