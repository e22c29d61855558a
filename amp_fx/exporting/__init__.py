"""Programs that carry their precision with them: ``torch.export``, AOTInductor, ONNX."""
