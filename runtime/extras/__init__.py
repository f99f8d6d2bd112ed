"""Extra outputs: outputs besides tokens that requests may ask for, such as log-probabilities.

Each extra output has a folder with two halves. The front half, in the HTTP process, reads the
request and forms the answer. The device half, in the worker, computes the values.
"""
