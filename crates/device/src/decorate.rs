//! The forwarder: what stands before another device, such as [`crate::Record`] and [`crate::Profile`].

use crate::{
    Batch, Control, Data, DeviceInfo, Driver, Error, Fetch, Memory, Observe, OutputMemory, Peer, Pending,
    Place, Placing, Spans, UploadBuffer,
};
use kiln_ir::{Id, Meta, Op};
use std::any::Any;

/// A device before another one, to which it hands on every call that it does not answer itself.
///
/// Who implements it names the device below and overrides what is to differ; it then is a [`Driver`] with all the parts of
/// the one below.
///
/// ```
/// use kiln_device::{Batch, Decorator, DeviceInfo, Driver};
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// /// Counts what is submitted.
/// struct Counted(Arc<dyn Driver>, AtomicUsize);
///
/// impl Decorator for Counted {
///     fn inner(&self) -> &dyn Driver {
///         &*self.0
///     }
///     fn info(&self) -> DeviceInfo {
///         let info = self.0.info();
///         DeviceInfo { name: format!("counted<{}>", info.name), ..info }
///     }
///     fn submit(&self, batch: Batch) {
///         self.1.fetch_add(batch.items.len(), Ordering::Relaxed);
///         self.0.submit(batch);
///     }
/// }
/// # fn is_a_device(_: impl Driver) {}
/// # fn check(device: Arc<dyn Driver>) { is_a_device(Counted(device, AtomicUsize::new(0))) }
/// ```
pub trait Decorator: Send + Sync + 'static {
    /// The device below.
    fn inner(&self) -> &dyn Driver;
    /// See [`Driver::info`].
    fn info(&self) -> DeviceInfo {
        self.inner().info()
    }
    /// See [`Driver::submit`].
    fn submit(&self, batch: Batch) {
        self.inner().submit(batch);
    }
    /// See [`Driver::write`].
    fn write(&self, id: Id, data: Data, place: Place) {
        self.inner().write(id, data, place);
    }
    /// Both [`Driver::read`] and [`Driver::read_as`], whose caller knows what the value is.
    fn read(&self, id: Id, known: Option<Meta>) -> Pending<Data> {
        match known {
            Some(meta) => self.inner().read_as(id, meta),
            None => self.inner().read(id),
        }
    }
    /// See [`Driver::sync`].
    fn sync(&self) -> Pending<()> {
        self.inner().sync()
    }
    /// See [`Driver::memory`].
    fn memory(&self) -> Memory {
        self.inner().memory()
    }
    /// See [`Driver::supports`].
    fn supports(&self, op: &Op, ins: &[Meta]) -> bool {
        self.inner().supports(op, ins)
    }
    /// See [`Driver::any`].
    fn any(&self) -> Option<&dyn Any> {
        self.inner().any()
    }
    /// See [`Placing::stage`].
    fn stage(&self, data: Vec<Data>) -> Vec<Data> {
        self.inner().stage(data)
    }
    /// See [`Placing::upload_buffer`].
    fn upload_buffer(&self, len: usize, place: Place) -> Option<Box<dyn UploadBuffer>> {
        self.inner().upload_buffer(len, place)
    }
    /// See [`Placing::place_output`].
    fn place_output(&self, id: Id, memory: OutputMemory) {
        self.inner().place_output(id, memory);
    }
    /// See [`Peer::fetch`].
    fn fetch(&self, fetch: Fetch<'_>) -> bool {
        self.inner().fetch(fetch)
    }
    /// See [`Observe::failures`].
    fn failures(&self) -> Vec<Error> {
        self.inner().failures()
    }
    /// See [`Observe::events`].
    fn events(&self) -> Vec<String> {
        self.inner().events()
    }
    /// See [`Observe::trace`].
    fn trace(&self, on: bool) -> Result<(), Error> {
        self.inner().trace(on)
    }
    /// See [`Observe::spans`].
    fn spans(&self, most: usize) -> Pending<Spans> {
        self.inner().spans(most)
    }
    /// See [`Observe::is_idle`].
    fn is_idle(&self) -> bool {
        self.inner().is_idle()
    }
    /// See [`Control::limit`].
    fn limit(&self, bytes: Option<usize>) {
        self.inner().limit(bytes);
    }
    /// See [`Control::cleanup`].
    fn cleanup(&self) {
        self.inner().cleanup();
    }
    /// See [`Control::flush`].
    fn flush(&self) -> Result<(), Error> {
        self.inner().flush()
    }
    /// See [`Control::close`]. What the decorator holds is brought to its file first.
    fn close(&self) {
        let _ = self.flush();
        self.inner().close();
    }
    /// See [`Control::stop`].
    fn stop(&self) {
        self.inner().stop();
    }
    /// See [`Control::ended`].
    fn ended(&self) -> Option<Error> {
        self.inner().ended()
    }
}

impl<D: Decorator> Driver for D {
    fn info(&self) -> DeviceInfo {
        Decorator::info(self)
    }
    fn submit(&self, batch: Batch) {
        Decorator::submit(self, batch);
    }
    fn write(&self, id: Id, data: Data, place: Place) {
        Decorator::write(self, id, data, place);
    }
    fn read(&self, id: Id) -> Pending<Data> {
        Decorator::read(self, id, None)
    }
    fn read_as(&self, id: Id, meta: Meta) -> Pending<Data> {
        Decorator::read(self, id, Some(meta))
    }
    fn sync(&self) -> Pending<()> {
        Decorator::sync(self)
    }
    fn memory(&self) -> Memory {
        Decorator::memory(self)
    }
    fn supports(&self, op: &Op, ins: &[Meta]) -> bool {
        Decorator::supports(self, op, ins)
    }
    fn placing(&self) -> Option<&dyn Placing> {
        Some(self)
    }
    fn peer(&self) -> Option<&dyn Peer> {
        Some(self)
    }
    fn observe(&self) -> Option<&dyn Observe> {
        Some(self)
    }
    fn control(&self) -> Option<&dyn Control> {
        Some(self)
    }
    fn any(&self) -> Option<&dyn Any> {
        Decorator::any(self)
    }
}

impl<D: Decorator> Placing for D {
    fn stage(&self, data: Vec<Data>) -> Vec<Data> {
        Decorator::stage(self, data)
    }
    fn upload_buffer(&self, len: usize, place: Place) -> Option<Box<dyn UploadBuffer>> {
        Decorator::upload_buffer(self, len, place)
    }
    fn place_output(&self, id: Id, memory: OutputMemory) {
        Decorator::place_output(self, id, memory);
    }
}

impl<D: Decorator> Peer for D {
    fn fetch(&self, fetch: Fetch<'_>) -> bool {
        Decorator::fetch(self, fetch)
    }
}

impl<D: Decorator> Observe for D {
    fn failures(&self) -> Vec<Error> {
        Decorator::failures(self)
    }
    fn events(&self) -> Vec<String> {
        Decorator::events(self)
    }
    fn trace(&self, on: bool) -> Result<(), Error> {
        Decorator::trace(self, on)
    }
    fn spans(&self, most: usize) -> Pending<Spans> {
        Decorator::spans(self, most)
    }
    fn is_idle(&self) -> bool {
        Decorator::is_idle(self)
    }
}

impl<D: Decorator> Control for D {
    fn limit(&self, bytes: Option<usize>) {
        Decorator::limit(self, bytes);
    }
    fn cleanup(&self) {
        Decorator::cleanup(self);
    }
    fn flush(&self) -> Result<(), Error> {
        Decorator::flush(self)
    }
    fn close(&self) {
        Decorator::close(self);
    }
    fn stop(&self) {
        Decorator::stop(self);
    }
    fn ended(&self) -> Option<Error> {
        Decorator::ended(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bytes, Keep, Locality, Processor, Span};
    use kiln_ir::{DType, Unary};
    use std::collections::BTreeSet;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    /// A device whose every answer differs from what one without parts gives. Keeps the names of what was asked.
    #[derive(Default)]
    struct Unlike(Mutex<BTreeSet<&'static str>>);

    impl Unlike {
        fn asked(&self, name: &'static str) {
            self.0.lock().unwrap().insert(name);
        }
    }

    fn meta() -> Meta {
        Meta::new(DType::U8, [3])
    }

    fn data(byte: u8) -> Data {
        Data::new(meta(), Bytes::new(vec![byte; 3]))
    }

    fn spans(left: u64) -> Spans {
        let span = Span {
            name: "odd".into(),
            nodes: 1,
            bytes: 2,
            from: Duration::ZERO,
            took: Duration::from_secs(3),
        };
        Spans { spans: vec![span], left, lost: 5, now: Duration::from_secs(6) }
    }

    fn info() -> DeviceInfo {
        DeviceInfo {
            name: "unlike".into(),
            count: 7,
            usage: Vec::new(),
            numerics: "odd-9".into(),
            locality: Locality::Server("far".into()),
            processor: Processor::Accelerator,
            asynchronous: true,
            supports_all: true,
            places_outputs: true,
            peers: Some("odd"),
        }
    }

    struct Upload;

    impl UploadBuffer for Upload {
        fn bytes(&mut self) -> &mut [u8] {
            &mut []
        }
        fn done(self: Box<Self>) -> Bytes {
            Bytes::new(vec![77])
        }
    }

    impl Driver for Unlike {
        fn info(&self) -> DeviceInfo {
            self.asked("info");
            info()
        }
        fn submit(&self, batch: Batch) {
            assert_eq!(batch.place, Place::Persistent);
            self.asked("submit");
        }
        fn write(&self, id: Id, data: Data, place: Place) {
            assert_eq!((id, data.meta, place), (Id(1), meta(), Place::Persistent));
            self.asked("write");
        }
        fn read(&self, id: Id) -> Pending<Data> {
            self.asked("read");
            Pending::ready(Ok(data(id.0 as u8)))
        }
        fn read_as(&self, id: Id, _: Meta) -> Pending<Data> {
            self.asked("read_as");
            Pending::ready(Ok(data(id.0 as u8 + 100)))
        }
        fn sync(&self) -> Pending<()> {
            self.asked("sync");
            Pending::ready(Err(Error::Stopped))
        }
        fn memory(&self) -> Memory {
            self.asked("memory");
            Memory { values: 11, ..Memory::default() }
        }
        fn supports(&self, op: &Op, ins: &[Meta]) -> bool {
            self.asked("supports");
            !(*op == Op::Unary(Unary::Exp) && ins == [meta()])
        }
        fn placing(&self) -> Option<&dyn Placing> {
            self.asked("placing");
            Some(self)
        }
        fn peer(&self) -> Option<&dyn Peer> {
            self.asked("peer");
            Some(self)
        }
        fn observe(&self) -> Option<&dyn Observe> {
            self.asked("observe");
            Some(self)
        }
        fn control(&self) -> Option<&dyn Control> {
            self.asked("control");
            Some(self)
        }
        fn any(&self) -> Option<&dyn Any> {
            self.asked("any");
            Some(self)
        }
    }

    impl Placing for Unlike {
        fn stage(&self, _: Vec<Data>) -> Vec<Data> {
            self.asked("stage");
            vec![data(3), data(4)]
        }
        fn upload_buffer(&self, len: usize, place: Place) -> Option<Box<dyn UploadBuffer>> {
            assert_eq!((len, place), (5, Place::Persistent));
            self.asked("upload_buffer");
            Some(Box::new(Upload))
        }
        fn place_output(&self, id: Id, memory: OutputMemory) {
            assert!(id == Id(6) && memory().is_some_and(|bytes| bytes[..] == [9]));
            self.asked("place_output");
        }
    }

    impl Peer for Unlike {
        fn fetch(&self, fetch: Fetch<'_>) -> bool {
            self.asked("fetch");
            (fetch.id, fetch.meta, fetch.place, fetch.from) == (Id(1), meta(), Place::Persistent, Id(2))
                && fetch.source.memory().values == 11
                && *fetch.keep.downcast::<u8>().unwrap() == 8
        }
    }

    impl Observe for Unlike {
        fn failures(&self) -> Vec<Error> {
            self.asked("failures");
            vec![Error::Stopped]
        }
        fn events(&self) -> Vec<String> {
            self.asked("events");
            vec!["it rained".into()]
        }
        fn trace(&self, on: bool) -> Result<(), Error> {
            self.asked("trace");
            if on { Ok(()) } else { Err(Error::NotOne(2)) }
        }
        fn spans(&self, most: usize) -> Pending<Spans> {
            self.asked("spans");
            Pending::ready(Ok(spans(most as u64)))
        }
        fn is_idle(&self) -> bool {
            self.asked("is_idle");
            true
        }
    }

    impl Control for Unlike {
        fn limit(&self, bytes: Option<usize>) {
            assert_eq!(bytes, Some(12));
            self.asked("limit");
        }
        fn cleanup(&self) {
            self.asked("cleanup");
        }
        fn flush(&self) -> Result<(), Error> {
            self.asked("flush");
            Err(Error::NotOne(3))
        }
        fn close(&self) {
            self.asked("close");
        }
        fn stop(&self) {
            self.asked("stop");
        }
        fn ended(&self) -> Option<Error> {
            self.asked("ended");
            Some(Error::NotOne(4))
        }
    }

    /// A decorator with nothing of its own.
    struct Plain(Arc<dyn Driver>);

    impl Decorator for Plain {
        fn inner(&self) -> &dyn Driver {
            &*self.0
        }
    }

    /// The methods of the traits in `driver.rs`, as they are written there.
    fn declared() -> BTreeSet<&'static str> {
        let source = include_str!("driver.rs");
        let bodies = source.split("\npub trait ").skip(1).filter_map(|rest| rest.split("\n}").next());
        let names = bodies.flat_map(|body| body.split("\n    fn ").skip(1));
        names.filter_map(|text| text.split(['(', '<']).next()).collect()
    }

    #[test]
    fn a_decorator_hands_every_method_on() {
        let unlike = Arc::new(Unlike::default());
        let twice: Arc<dyn Driver> = Arc::new(Plain(Arc::new(Plain(unlike.clone()))));
        let device = &*twice;
        assert_eq!(device.info(), info());
        device.submit(Batch { place: Place::Persistent, ..Batch::default() });
        device.write(Id(1), data(0), Place::Persistent);
        assert_eq!(device.read(Id(2)).wait().unwrap().bytes[..], [2; 3]);
        assert_eq!(device.read_as(Id(2), meta()).wait().unwrap().bytes[..], [102; 3]);
        assert_eq!(device.sync().wait(), Err(Error::Stopped));
        assert_eq!(device.memory().values, 11);
        assert!(!device.supports(&Op::Unary(Unary::Exp), &[meta()]));
        assert!(device.any().is_some_and(|any| any.is::<Unlike>()));
        assert_eq!(device.stage(Vec::new()).len(), 2);
        let buffer = device.upload_buffer(5, Place::Persistent).unwrap();
        assert_eq!(buffer.done()[..], [77]);
        device.place_output(Id(6), Arc::new(|| Some(Bytes::new(vec![9]))));
        let keep: Keep = Arc::new(8u8);
        let place = Place::Persistent;
        assert!(device.fetch(Fetch { id: Id(1), meta: meta(), place, source: device, from: Id(2), keep }));
        assert_eq!(device.failures(), [Error::Stopped]);
        assert_eq!(device.events(), ["it rained"]);
        assert_eq!((device.trace(true), device.trace(false)), (Ok(()), Err(Error::NotOne(2))));
        assert_eq!(device.spans(13).wait(), Ok(spans(13)));
        assert!(device.is_idle());
        device.limit(Some(12));
        device.cleanup();
        assert_eq!(device.flush(), Err(Error::NotOne(3)));
        device.close();
        device.stop();
        assert_eq!(device.ended(), Some(Error::NotOne(4)));
        let asked = unlike.0.lock().unwrap().clone();
        assert_eq!(asked, declared(), "left: what reached the device, right: what the traits have");
        assert!(asked.len() >= 27, "{asked:?}");
    }
}
