"""The laboratory of headway: `explain`, `bench` and `demo`. The library never imports it."""
