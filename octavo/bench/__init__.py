"""``octavo bench``: a load generator for any OpenAI-compatible server, offline measurements, and sweeps over loads.

The client side (everything but ``offline`` and the local tokenizer) needs neither torch nor the engine: it measures
other servers as well. It is kept cheap, because on a machine with few cores the client's own work is part of what is
measured.
"""
