"""The demo model's recipe: generators of its text, training, evaluation, the model card.

The checkpoint that came out is `headrace/demo/model`.
"""
