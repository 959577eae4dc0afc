"""Resume, in a layout-free format, and HF export."""
