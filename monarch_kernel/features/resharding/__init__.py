"""Tensors of many ranks move to other ranks that hold them in other parts: what lies where, who reads what from whom."""
