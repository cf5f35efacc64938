//! A device in two pages: values are interpreted one node at a time, and chains of elementwise nodes run as one.
//!
//! All it does for fusion is to hand its batches to an [`Engine`], answer for its values ([`Handles`]) and list a
//! fuser. Plans, their search, cache and replay are the engine's.

mod chain;

pub use chain::Chain;

use kiln::Error;
use kiln::device::reference::{self, Value};
use kiln::device::{Batch, Bytes, Data, Driver, DeviceInfo, Memory, Pending, Place};
use kiln::fuse::{Engine, Handles, Limits, Stats};
use kiln::ir::{Id, Item, Meta, Node, Op};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// The device.
pub struct Toy {
    state: Mutex<State>,
}

struct State {
    values: Values,
    engine: Engine<Value>,
}

/// Values by name, or why there is none; and how many nodes ran by themselves.
#[derive(Default)]
struct Values {
    table: HashMap<Id, Result<Value, Arc<Error>>>,
    alone: usize,
}

impl Toy {
    /// A device that fuses chains.
    pub fn start() -> Toy {
        let engine = Engine::new(vec![Box::new(Chain::default())], Limits::default());
        Toy { state: Mutex::new(State { values: Values::default(), engine }) }
    }

    /// What fusion has done.
    pub fn fusion(&self) -> Stats {
        self.state().engine.stats()
    }

    /// How many nodes ran by themselves.
    pub fn alone(&self) -> usize {
        self.state().values.alone
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Driver for Toy {
    fn info(&self) -> DeviceInfo {
        DeviceInfo::new("toy", "toy-1")
    }

    fn submit(&self, batch: Batch) {
        let State { values, engine } = &mut *self.state();
        let meta = |id: Id| values.table.get(&id)?.as_ref().ok().map(Value::meta);
        match engine.plan(&batch.items, &meta) {
            Some(plan) => engine.replay(plan, &batch.items, values),
            // Something is poisoned or does not fit: node by node, so that each error is told at its own node.
            None => {
                for (at, item) in batch.items.iter().enumerate() {
                    match item {
                        Item::Free(id) => values.free(*id),
                        Item::Run(node) => values.run(at, node, &[]),
                    }
                }
            }
        }
    }

    fn write(&self, id: Id, data: Data, _: Place) {
        self.state().values.put(id, Value::from_bytes(data.meta, &data.bytes));
    }

    fn read(&self, id: Id) -> Pending<Data> {
        Pending::ready(match self.state().values.table.get(&id) {
            Some(Ok(value)) => Ok(Data::new(value.meta(), Bytes::new(value.to_bytes()))),
            Some(Err(error)) => Err((**error).clone()),
            None => Err(Error::UnknownValue(id)),
        })
    }

    fn sync(&self) -> Pending<()> {
        Pending::ready(Ok(()))
    }

    fn supports(&self, op: &Op, _: &[Meta]) -> bool {
        // Composites are left to the recording side, which writes them as primitives.
        !matches!(op, Op::Named(_))
    }

    fn memory(&self) -> Memory {
        Memory { values: self.state().values.table.len(), ..Memory::default() }
    }
}

impl Values {
    fn eval(&self, node: &Node) -> Result<Vec<Value>, Arc<Error>> {
        let unknown = |id: Id| Err(Arc::new(Error::UnknownValue(id)));
        let value =
            |id: &Id| self.table.get(id).map_or_else(|| unknown(*id), |v| v.as_ref().map_err(Arc::clone));
        let ins = node.ins.iter().map(value).collect::<Result<Vec<&Value>, _>>()?;
        let failed = |message: String| Error::Custom { op: node.op.name().into(), message };
        let outs = reference::eval(&node.op, &ins).map_err(|e| Arc::new(failed(e.to_string())))?;
        Ok(outs.into_iter().collect())
    }
}

impl Handles<Value> for Values {
    fn get(&self, id: Id) -> Option<&Value> {
        self.table.get(&id)?.as_ref().ok()
    }

    fn put(&mut self, id: Id, value: Value) {
        self.table.insert(id, Ok(value));
    }

    fn run(&mut self, _: usize, node: &Node, _: &[Id]) {
        self.alone += 1;
        match self.eval(node) {
            Ok(outs) => self.table.extend(node.outs.iter().copied().zip(outs.into_iter().map(Ok))),
            Err(poison) => self.table.extend(node.outs.iter().map(|&id| (id, Err(poison.clone())))),
        }
    }

    fn fail(&mut self, _: usize, nodes: &[&Node], error: Error) {
        let poison = Arc::new(error);
        self.table.extend(nodes.iter().flat_map(|n| &n.outs).map(|&id| (id, Err(poison.clone()))));
    }

    fn free(&mut self, id: Id) {
        self.table.remove(&id);
    }

    fn place(&self) -> Place {
        Place::Reuse
    }
}
