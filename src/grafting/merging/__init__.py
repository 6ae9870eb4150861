"""Grafts: updates learned on donors, masked, combined, scaled and added to the deployed model."""
