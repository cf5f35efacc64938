//! A device with a stream: what is launched waits in line until a thread of its own executes it, no sooner than the test
//! lets it. It has one fuser, for two elementwise operations behind each other.

mod pair;

use kiln_cpu::reference::{self, Value};
use kiln_device::{Bytes, Data, DeviceInfo, Error, Memory, Place, Processor, Promise, pending};
use kiln_fuse::Fuser;
use kiln_host::{Arg, Faults, Kernels};
use kiln_ir::{Meta, Op, infer};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The device's kernels. Dropping them ends the thread.
pub struct Late(pub Arc<Stream>);

/// What the kernels and the thread share, and the test looks at.
#[derive(Default)]
pub struct Stream {
    state: Mutex<State>,
    news: Condvar,
    /// Whether a composite is taken whole.
    claims: Option<fn(&Op, &[Meta]) -> bool>,
    /// The operation that fails when it is executed.
    fails: &'static str,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    /// What has been launched, by name.
    names: Vec<String>,
    done: u64,
    /// Launches that the test lets be done.
    allowed: u64,
    failed: Vec<(u64, Error)>,
    ended: bool,
}

enum Job {
    Kernel(Box<dyn FnOnce() -> Result<(), Error> + Send>),
    Answer(Box<dyn FnOnce() + Send>),
}

/// A value, which has its content when the stream has come there.
#[derive(Clone)]
pub struct Cell {
    meta: Meta,
    content: Arc<Mutex<Option<Value>>>,
}

impl Late {
    pub fn new(claims: Option<fn(&Op, &[Meta]) -> bool>, fails: &'static str) -> (Late, Arc<Stream>) {
        let stream = Arc::new(Stream { claims, fails, ..Stream::default() });
        let thread = stream.clone();
        std::thread::spawn(move || thread.execute());
        (Late(stream.clone()), stream)
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Stream {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Lets everything be done, also what comes.
    pub fn open(&self) {
        self.state().allowed = u64::MAX;
        self.news.notify_all();
    }

    /// What has been launched, by name.
    pub fn names(&self) -> Vec<String> {
        self.state().names.clone()
    }

    pub fn done(&self) -> u64 {
        self.state().done
    }

    /// Waits until so many promises are in line.
    pub fn promised(&self, count: usize) {
        let start = Instant::now();
        while self.state().queue.iter().filter(|job| matches!(job, Job::Answer(_))).count() < count {
            assert!(start.elapsed() < Duration::from_secs(20), "nothing was promised");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn push(&self, job: Job) {
        let mut state = self.state();
        if !state.ended {
            state.queue.push_back(job);
            self.news.notify_all();
        }
    }

    /// Launches operations one after another as one kernel: each with its operands and results.
    fn launch(&self, name: &str, steps: Vec<(Op, Vec<Cell>, Vec<Cell>)>) {
        self.state().names.push(name.into());
        let fails = self.fails;
        self.push(Job::Kernel(Box::new(move || {
            for (op, ins, outs) in steps {
                let values: Vec<Value> =
                    ins.iter().map(|x| x.content.lock().unwrap().clone().unwrap()).collect();
                let given = match op.name() == fails {
                    true => Err("it was to fail".to_string()),
                    false => {
                        reference::eval(&op, &values.iter().collect::<Vec<_>>()).map_err(|e| e.to_string())
                    }
                };
                let error = given.as_ref().err().cloned();
                // What fails leaves something behind all the same, as on a GPU.
                let zeros =
                    || outs.iter().map(|x| Value::from_bytes(x.meta, &vec![0; x.meta.bytes()])).collect();
                for (out, value) in outs.iter().zip(given.unwrap_or_else(|_| zeros())) {
                    *out.content.lock().unwrap() = Some(value);
                }
                if let Some(message) = error {
                    return Err(Error::Custom { op: op.name().into(), message });
                }
            }
            Ok(())
        })));
    }

    /// The thread. It answers without holding anything.
    fn execute(&self) {
        loop {
            let mut state = self.state();
            let job = loop {
                match state.queue.front() {
                    _ if state.ended => return,
                    Some(Job::Kernel(_)) if state.done < state.allowed => break state.queue.pop_front(),
                    Some(Job::Answer(_)) => break state.queue.pop_front(),
                    _ => state = self.news.wait(state).unwrap(),
                }
            };
            drop(state);
            match job {
                Some(Job::Kernel(run)) => {
                    let error = run().err();
                    let mut state = self.state();
                    state.done += 1;
                    let at = state.done;
                    state.failed.extend(error.map(|error| (at, error)));
                }
                Some(Job::Answer(answer)) => answer(),
                None => {}
            }
        }
    }

    fn end(&self) {
        let mut state = self.state();
        state.ended = true;
        let left = std::mem::take(&mut state.queue);
        drop(state);
        // Their promises answer while they are dropped.
        drop(left);
        self.news.notify_all();
    }
}

fn cell(meta: Meta) -> Cell {
    Cell { meta, content: Arc::default() }
}

impl Kernels for Late {
    type Value = Cell;

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            processor: Processor::Accelerator,
            asynchronous: true,
            ..DeviceInfo::new("late", "late-1")
        }
    }

    fn upload(&self, data: &Data, _: Place) -> Result<Cell, Error> {
        let (value, out) = (Value::from_bytes(data.meta, &data.bytes), cell(data.meta));
        self.0.state().names.push("write".into());
        let content = out.content.clone();
        self.0.push(Job::Kernel(Box::new(move || {
            *content.lock().unwrap() = Some(value);
            Ok(())
        })));
        Ok(out)
    }

    fn meta(&self, value: &Cell) -> Meta {
        value.meta
    }

    fn download(&self, value: &Cell) -> Result<Data, Error> {
        let (promise, answer) = pending(None);
        self.download_to(value, promise);
        answer.wait()
    }

    fn eval(&self, op: &Op, ins: &mut [Arg<Cell>], _: Place) -> Result<SmallVec<[Cell; 2]>, Error> {
        let metas: SmallVec<[Meta; 4]> = ins.iter().map(|x| x.meta).collect();
        let outs: Vec<Cell> = infer(op, &metas)?.into_iter().map(cell).collect();
        let ins = ins.iter().map(|x| (**x).clone()).collect();
        self.0.launch(op.name(), vec![(op.clone(), ins, outs.clone())]);
        Ok(outs.into())
    }

    fn memory(&self) -> Memory {
        Memory::default()
    }

    fn fusers(&self) -> Vec<Box<dyn Fuser<Cell>>> {
        vec![Box::new(pair::Pair::new(self.0.clone()))]
    }

    fn supports(&self, op: &Op, ins: &[Meta]) -> bool {
        !matches!(op, Op::Named(_)) || self.claims(op, ins)
    }

    fn claims(&self, op: &Op, ins: &[Meta]) -> bool {
        self.0.claims.is_some_and(|claims| claims(op, ins))
    }

    fn launched(&self) -> u64 {
        self.0.state().names.len() as u64
    }

    fn faults(&self) -> Faults {
        let mut state = self.0.state();
        Faults { done: state.done, failed: std::mem::take(&mut state.failed) }
    }

    fn finish(&self, done: Promise<()>) {
        self.0.push(Job::Answer(Box::new(move || done.answer(Ok(())))));
    }

    fn download_to(&self, value: &Cell, to: Promise<Data>) {
        let value = value.clone();
        self.0.push(Job::Answer(Box::new(move || {
            let content = value.content.lock().unwrap().clone().unwrap();
            to.answer(Ok(Data::new(value.meta, Bytes::new(content.to_bytes()))));
        })));
    }

    fn stop(&self) {
        self.0.end();
    }
}
