"""Mixture-of-experts layers: our router and experts around megatron-core's layer and token dispatchers."""
