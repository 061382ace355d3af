"""Replay against a server that speaks OpenAI's protocol: open loop, streaming, with the server's own metrics."""
