"""Benchmarks of a whole sync: `fp8bridge bench`. Nothing outside of this package imports it but the command."""
