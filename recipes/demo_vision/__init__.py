"""The vision demo model's recipe: drawn pictures, questions about them, training, evaluation.

The resulting checkpoint is `headrace/demo/vision`.
"""
