"""Grafting against on-policy self-distillation: a reproducible continual-learning study."""

__version__ = "0.1.0"
