//! Checks a whole stream: every operand is defined and alive, every name is new, every operation fits.

use crate::{Id, Item, Meta, Node, OpError, infer};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// A stream with the values it starts from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Program {
    /// Values defined from outside.
    pub inputs: Vec<(Id, Meta)>,
    /// The stream.
    pub items: Vec<Item>,
}

/// A program that passed [`verify`], with the meta of every value it defines.
#[derive(Clone, Debug)]
pub struct Verified {
    /// The program.
    pub program: Program,
    /// Metas of inputs and results.
    pub metas: FxHashMap<Id, Meta>,
}

/// Why a stream is not valid.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum VerifyError {
    #[error("item {item}: {id} is not defined")]
    Undefined { item: usize, id: Id },
    #[error("item {item}: {id} is freed already")]
    Freed { item: usize, id: Id },
    #[error("item {item}: {id} is defined already")]
    Redefined { item: usize, id: Id },
    #[error("item {item}: the operation gives {want} values, not {got}")]
    Results { item: usize, want: usize, got: usize },
    #[error("item {item}: {error}")]
    Op { item: usize, error: OpError },
}

/// Checks `program`.
pub fn verify(program: Program) -> Result<Verified, VerifyError> {
    let mut scope = Scope::default();
    for (id, meta) in &program.inputs {
        meta.check().map_err(|error| VerifyError::Op { item: 0, error })?;
        scope.define(0, *id, *meta)?;
    }
    for (item, entry) in program.items.iter().enumerate() {
        match entry {
            Item::Run(node) => scope.run(item, node)?,
            Item::Free(id) => scope.free(item, *id)?,
        }
    }
    Ok(Verified { program, metas: scope.metas })
}

#[derive(Default)]
struct Scope {
    metas: FxHashMap<Id, Meta>,
    freed: rustc_hash::FxHashSet<Id>,
}

impl Scope {
    fn run(&mut self, item: usize, node: &Node) -> Result<(), VerifyError> {
        let ins: SmallVec<[Meta; 4]> =
            node.ins.iter().map(|id| self.alive(item, *id)).collect::<Result<_, _>>()?;
        let outs = infer(&node.op, &ins).map_err(|error| VerifyError::Op { item, error })?;
        if outs.len() != node.outs.len() {
            return Err(VerifyError::Results { item, want: outs.len(), got: node.outs.len() });
        }
        node.outs.iter().zip(outs).try_for_each(|(id, meta)| self.define(item, *id, meta))
    }

    fn free(&mut self, item: usize, id: Id) -> Result<(), VerifyError> {
        self.alive(item, id)?;
        self.freed.insert(id);
        Ok(())
    }

    fn alive(&self, item: usize, id: Id) -> Result<Meta, VerifyError> {
        if self.freed.contains(&id) {
            return Err(VerifyError::Freed { item, id });
        }
        self.metas.get(&id).copied().ok_or(VerifyError::Undefined { item, id })
    }

    fn define(&mut self, item: usize, id: Id, meta: Meta) -> Result<(), VerifyError> {
        match self.metas.insert(id, meta) {
            None => Ok(()),
            Some(_) => Err(VerifyError::Redefined { item, id }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse;

    fn check(text: &str) -> Result<(), String> {
        verify(parse(text).unwrap()).map(|_| ()).map_err(|e| e.to_string())
    }

    #[test]
    fn streams_are_checked() {
        assert_eq!(check("a = input f32[2]\nb = exp a\nfree a\nc = neg b"), Ok(()));
        assert_eq!(check("a = input f32[2]\nfree a\nb = exp a").unwrap_err(), "item 1: v0 is freed already");
        assert_eq!(
            check("a = input f32[2]\nb = input f32[3]\nc = add a b").unwrap_err(),
            "item 0: add: shapes [2] and [3] do not fit together"
        );
        assert_eq!(
            check("a = input f32[2]\nb = sort a axis=0 descending=false take=2").unwrap_err(),
            "item 0: the operation gives 2 values, not 1"
        );
    }
}
