"""What a model is worth: the loss on held-out text, and accuracies on multiple-choice tasks, offline.

tasks -> encode -> score -> accuracy. A model, plain or compiled, is anything with `log_likelihoods` (score.Scored).
"""
