"""From one configuration to the jobs of the study, each named by the hash of what it is."""
