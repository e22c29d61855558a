"""Exported programs with casts: ``torch.export``, AOTInductor, ONNX."""
