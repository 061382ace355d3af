"""An OpenAI-compatible server for tests: the engine's scheduler on the wall clock, without a model."""
