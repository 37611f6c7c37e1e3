"""Detection: boxes, targets, losses and the training recipe of YOLOv5."""
