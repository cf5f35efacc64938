//! Checks a whole stream: every operand is defined and alive, every name is new, every operation fits.

use crate::{Id, Item, Meta, Node, OpError, infer};
use rustc_hash::{FxHashMap, FxHashSet};
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
    #[error("item {item}: {id} is a name that only a device may give")]
    Reserved { item: usize, id: Id },
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

/// The names of a stream so far, for streams that are checked as they come.
#[derive(Default)]
pub struct Scope {
    metas: FxHashMap<Id, Meta>,
    freed: FxHashSet<Id>,
    /// Values that there are not, by [`Scope::admit`].
    failed: FxHashSet<Id>,
}

impl Scope {
    /// Takes item number `item` of a stream whose operations may fail: one that does not fit, or whose operands are not
    /// there, fails where it runs, and its results with it. What is refused is what no recording side writes: a name that
    /// is given twice or is reserved, and another number of results.
    pub fn admit(&mut self, item: usize, entry: &Item) -> Result<(), VerifyError> {
        use VerifyError::{Freed, Op, Undefined};
        match entry {
            Item::Run(node) => match self.run(item, node) {
                Err(Undefined { .. } | Freed { .. } | Op { .. }) => {
                    node.outs.iter().try_for_each(|&id| self.fail(item, id))
                }
                other => other,
            },
            Item::Free(id) => {
                self.freed.insert(*id);
                Ok(())
            }
        }
    }

    fn fail(&mut self, item: usize, id: Id) -> Result<(), VerifyError> {
        self.fresh(item, id)?;
        self.failed.insert(id);
        Ok(())
    }

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

    /// Defines a value from outside, or as the result of item number `item`.
    pub fn define(&mut self, item: usize, id: Id, meta: Meta) -> Result<(), VerifyError> {
        self.fresh(item, id)?;
        self.metas.insert(id, meta);
        Ok(())
    }

    fn fresh(&self, item: usize, id: Id) -> Result<(), VerifyError> {
        if id.is_reserved() {
            return Err(VerifyError::Reserved { item, id });
        }
        if self.metas.contains_key(&id) || self.failed.contains(&id) {
            return Err(VerifyError::Redefined { item, id });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse;
    use crate::{DType, Move, Op, Unary};

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

    #[test]
    fn what_fails_where_it_runs_is_admitted_and_a_name_given_twice_is_not() {
        let run = |op: Op, ins: &[u64], outs: &[u64]| {
            let ids = |ids: &[u64]| ids.iter().map(|&id| Id(id)).collect::<Vec<_>>();
            Item::Run(Node::new(op, &ids(ins), &ids(outs)))
        };
        let neg = || Op::Unary(Unary::Neg);
        let x = Meta::new(DType::F32, [2]);
        let admit = |items: &[Item]| {
            let mut scope = Scope::default();
            scope.define(0, Id(0), x).unwrap();
            items.iter().enumerate().try_for_each(|(at, item)| scope.admit(at, item))
        };
        let absent = [run(neg(), &[7], &[1]), run(neg(), &[1], &[2]), Item::Free(Id(9))];
        assert_eq!(admit(&absent), Ok(()));
        let unfit = Op::Move(Move::Reshape([3].into()));
        assert_eq!(admit(&[run(unfit.clone(), &[0], &[1]), run(neg(), &[0], &[2])]), Ok(()));
        let twice = Err(VerifyError::Redefined { item: 2, id: Id(1) });
        assert_eq!(admit(&[run(neg(), &[0], &[1]), Item::Free(Id(1)), run(neg(), &[0], &[1])]), twice);
        assert_eq!(admit(&[run(unfit, &[0], &[1]), Item::Free(Id(1)), run(neg(), &[0], &[1])]), twice);
        let id = Id::LOWERED.at(5);
        assert_eq!(admit(&[run(neg(), &[0], &[id.0])]), Err(VerifyError::Reserved { item: 0, id }));
        assert_eq!(
            admit(&[run(neg(), &[0], &[1, 2])]),
            Err(VerifyError::Results { item: 0, want: 1, got: 2 })
        );
    }
}
