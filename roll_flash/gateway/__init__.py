"""OpenAI- and Anthropic-compatible endpoint for agents that bring their own loop.

It sends token ids to our servers and records the sampled tokens, so that unchanged agents can be trained.
"""
