//! For devices that stand before another one, such as [`crate::Record`] and [`crate::Profile`].

/// The methods of a device that hand everything on to the device in its field `inner`; its own are written beside them.
macro_rules! handed_on {
    () => {
        fn locality(&self) -> $crate::Locality {
            self.inner.locality()
        }

        fn any(&self) -> Option<&dyn std::any::Any> {
            self.inner.any()
        }

        fn place_output(&self, id: kiln_ir::Id, memory: $crate::OutputMemory) {
            self.inner.place_output(id, memory);
        }

        fn places_outputs(&self) -> bool {
            self.inner.places_outputs()
        }

        fn supports(&self, op: &kiln_ir::Op, ins: &[kiln_ir::Meta]) -> bool {
            self.inner.supports(op, ins)
        }

        fn supports_all(&self) -> bool {
            self.inner.supports_all()
        }

        fn memory(&self) -> $crate::Memory {
            self.inner.memory()
        }

        fn cleanup(&self) {
            self.inner.cleanup();
        }

        fn failures(&self) -> Vec<$crate::Error> {
            self.inner.failures()
        }

        fn limit(&self, bytes: Option<usize>) {
            self.inner.limit(bytes);
        }

        fn stage(&self, data: Vec<$crate::Data>) -> Vec<$crate::Data> {
            self.inner.stage(data)
        }

        fn upload_buffer(&self, len: usize, place: $crate::Place) -> Option<Box<dyn $crate::UploadBuffer>> {
            self.inner.upload_buffer(len, place)
        }

        fn events(&self) -> Vec<String> {
            self.inner.events()
        }

        fn ended(&self) -> Option<$crate::Error> {
            self.inner.ended()
        }

        fn trace(&self, on: bool) -> Result<(), $crate::Error> {
            self.inner.trace(on)
        }

        fn spans(&self, most: usize) -> $crate::Pending<$crate::Spans> {
            self.inner.spans(most)
        }

        fn is_idle(&self) -> Option<bool> {
            self.inner.is_idle()
        }

        fn close(&self) {
            let _ = self.flush();
            self.inner.close();
        }

        fn stop(&self) {
            self.inner.stop();
        }
    };
}

pub(crate) use handed_on;
