"""Sampling on inference servers: rollouts on vLLM and SGLang, a client for several servers, and weight transfer."""
