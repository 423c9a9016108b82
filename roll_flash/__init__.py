"""ROLL Flash: asynchronous reinforcement learning for language-model agents."""
