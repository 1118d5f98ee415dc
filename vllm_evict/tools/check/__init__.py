"""`vllm-evict check`: the refusals of a server, told on a machine without its device.

cli       flags of `vllm serve`, and the answer            stand_in  a device that this machine lacks
"""
