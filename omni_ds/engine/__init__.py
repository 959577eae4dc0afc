"""Runs the plan's actions on two DeepSpeed engines: the LLM's pipeline and the encoders."""
