"""What prefill and decode workers share: settings, assembly, the watch over their threads."""
