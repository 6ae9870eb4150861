"""How sensitive the deployed model is: Fisher estimates on retention data, and masks made from them."""
