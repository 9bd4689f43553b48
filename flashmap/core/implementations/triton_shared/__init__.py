"""What implementations in Triton share: functions on the device, kernel arguments, scratch memory. No implementation of its own."""
