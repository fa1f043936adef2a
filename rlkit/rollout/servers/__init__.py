"""Sampling on inference servers: a client for several servers, weight transfer, and rollouts on vLLM and SGLang."""
