"""Mixture-of-experts layers: our router and experts with megatron-core's layer and token dispatchers."""
