"""Constants of devices, measured once: where the cost model's numbers come from.

`vllm-relay calibrate` measures a device and a head shape and keeps what it found in a file of the
user; a file with the devices that we measured is part of the package. Constants are bandwidths and
rates, so that they also say something about head shapes that nobody measured.
"""
