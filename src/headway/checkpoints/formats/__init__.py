"""Formats that are converted: Meta, llama2.c, torchtune."""
