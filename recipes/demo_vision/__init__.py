"""The vision demo model's recipe: pictures it draws, questions about them, training, evaluation.

The checkpoint that comes out is `headrace/demo/vision_model`.
"""
