"""Models: loading, saving, chat templates, logits, and the small model made from scratch.

A model directory is an ordinary Hugging Face directory. torch and transformers are imported inside functions.
"""

from grafting.models.files import count_parameters, load_model, load_tokenizer, save_model

__all__ = ["count_parameters", "load_model", "load_tokenizer", "save_model"]
