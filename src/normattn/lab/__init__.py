"""The laboratory: train, evaluate and compare attention scores. The library never imports it."""
