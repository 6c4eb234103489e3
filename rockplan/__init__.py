"""rockplan: plan rematerialization of a PyTorch module under a byte budget."""
