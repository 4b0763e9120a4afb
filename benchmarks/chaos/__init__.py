"""Streams that outlive every process: random ones are killed under load, and each answer is compared with an undisturbed one."""
