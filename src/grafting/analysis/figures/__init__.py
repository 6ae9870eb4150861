"""Figures of a report. `write_figures` is the way in; nothing here loads matplotlib before it is called."""

from grafting.analysis.figures.everything import FIGURES, write_figures

__all__ = ["FIGURES", "write_figures"]
