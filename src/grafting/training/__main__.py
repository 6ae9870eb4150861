"""`python -m grafting.training`: the stage train."""

from grafting.provenance.runner import main

main("grafting.training.stage:run")
