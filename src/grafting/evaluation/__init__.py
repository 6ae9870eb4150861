"""Evaluation: the suites of a checkpoint (stage evaluate) and the choice by validation (stage select).

Nothing is imported here: `select` must stay importable without torch.
"""
