"""Process groups of torch.distributed in a mesh: forms and aborts them, and counts their collectives."""
