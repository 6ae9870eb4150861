"""`python -m grafting.rollouts`: the stage rollout."""

from grafting.provenance.runner import main

main("grafting.rollouts.stage:run")
