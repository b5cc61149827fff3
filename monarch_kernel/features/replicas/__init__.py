"""Comparison of replicas: whether ranks that should have equal tensors have equal tensors.

Theory of operation
===================

Two ranks are replicas of a tensor if both hold the same part of it: the whole tensor, or the same shard of a DTensor. Each rank
computes a digest of every such part, at about the speed of its memory, and sends only these (`worker`). Where the digests of
replicas differ (`compare`), a few ranks send digests of pieces of the first such tensor, and then the elements of the pieces
that differ, which gives the first element that differs and by how much (`locate`).

The program asks ranks through requests in order with their cells (`actor.replica_check`). In a live loop the ranks exchange
their digests in a collective, before the same step, and each of them raises the same error (`in_loop`).
"""
