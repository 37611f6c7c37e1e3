"""Object detection with YOLOv5: data sets, batches, boxes, targets, losses, training, and the evaluation of what is found."""
